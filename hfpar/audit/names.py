"""Given names that perturbed copies swap, and capitalised words that are none."""

from __future__ import annotations

FEMALE = tuple(
    "Abigail Ada Alice Alicia Allison Amanda Amber Amelia Amy Andrea Angela Anita Ann Anna Anne Annie Ashley "
    "Ava Barbara Beatrice Becky Beth Betty Bianca Bonnie Brenda Brianna Bridget Brooke Camila Candice Carla "
    "Carmen Carol Caroline Cassandra Catherine Cathy Cecilia Charlotte Chloe Christina Christine Cindy Claire "
    "Clara Claudia Courtney Crystal Daisy Danielle Debbie Deborah Debra Denise Diana Diane Donna Dora Doris "
    "Dorothy Edith Eileen Elaine Eleanor Elena Elizabeth Ella Ellen Ellie Emily Emma Erica Erin Esther Eva "
    "Evelyn Faith Felicia Fiona Florence Frances Gabriela Gail Georgia Gina Ginger Gloria Grace Greta Gretchen "
    "Gwen Haley Hannah Harriet Hazel Heather Heidi Helen Helena Holly Hope Ida Irene Iris Isabel Isabella Ivy "
    "Jackie Jacqueline Jade Jane Janet Janice Jasmine Jean Jen Jenna Jennie Jennifer Jenny Jessica Jill Joan "
    "Joanna Joanne Jocelyn Josephine Joy Joyce Judith Judy Julia Julie June Karen Kate Katherine Kathy Katie "
    "Kayla Kelly Kendra Kim Kimberly Kristen Kylie Laura Lauren Leah Lena Leslie Lillian Lily Linda Lindsay "
    "Lisa Lois Lola Lorraine Louise Lucia Lucy Lydia Lynn Mabel Madeline Maggie Mandy Marcia Margaret Margot "
    "Maria Marie Marilyn Marissa Martha Mary Maya Megan Melanie Melinda Melissa Mia Michelle Mildred Millie "
    "Miranda Molly Monica Nadia Nancy Naomi Natalia Natalie Nicole Nina Nora Norma Olivia Paige Pamela "
    "Patricia Patty Paula Peggy Penelope Penny Phoebe Phyllis Polly Rachel Rebecca Regina Renee Rita Roberta "
    "Robin Rosa Rosalie Rose Rosie Ruby Ruth Sabrina Sadie Sally Samantha Sandra Sandy Sara Sarah Selena "
    "Shannon Sharon Sheila Shelby Shelly Sherry Shirley Sofia Sonia Sophia Sophie Stacy Stella Stephanie Sue "
    "Susan Suzanne Sylvia Tamara Tanya Tara Teresa Tiffany Tina Tracy Valerie Vanessa Vera Veronica Vicky "
    "Victoria Violet Virginia Vivian Wanda Wendy Whitney Yolanda Yvonne Zoe".split()
)
MALE = tuple(
    "Aaron Bruno Otto Abel Abraham Adam Adrian Aidan Alan Albert Alejandro Alex Alexander Alfred Ali Allan Allen Alvin "
    "Andre Andrew Andy Anthony Antonio Arnold Arthur Austin Ben Benjamin Bernard Bill Billy Blake Bob Bobby "
    "Brad Bradley Brandon Brendan Brent Brett Brian Bruce Bryan Calvin Cameron Carl Carlos Cedric Charles "
    "Charlie Chester Chris Christian Christopher Clarence Clark Clifford Clinton Clyde Cole Colin Connor Corey "
    "Craig Curtis Cyrus Dale Damian Dan Daniel Danny Darren Dave David Dean Dennis Derek Diego Dominic Don "
    "Donald Doug Douglas Duncan Dustin Dylan Earl Eddie Edgar Edward Edwin Eli Elijah Elliott Eric Ernest "
    "Ethan Eugene Evan Felix Fernando Finn Floyd Francis Frank Franklin Fred Frederick Gabriel Garrett Gary "
    "Gavin Gene George Gerald Gilbert Glenn Gordon Graham Grant Greg Gregory Harold Harry Harvey Hector Henry "
    "Herbert Herman Howard Hugo Hunter Ian Isaac Ivan Jack Jackson Jacob Jaime Jake James Jamal Jared Jason "
    "Javier Jay Jeff Jeffrey Jeremy Jerome Jerry Jesse Jim Jimmy Joe Joel Joey John Johnny Jon Jonathan Jorge "
    "Jose Joseph Josh Joshua Juan Julian Justin Karl Keith Ken Kenneth Kenny Kevin Kyle Lance Larry Lawrence "
    "Leo Leon Leonard Lester Lewis Liam Lloyd Logan Louis Lucas Luis Luke Manuel Marco Marcus Mario Mark "
    "Marshall Martin Marvin Mason Matt Matthew Maurice Max Micah Michael Miguel Mike Miles Mitchell Morris "
    "Nathan Nathaniel Neil Nelson Nicholas Nick Noah Noel Norman Oliver Omar Oscar Owen Pablo Patrick Paul "
    "Pedro Perry Pete Peter Phil Philip Rafael Ralph Randy Raul Ray Raymond Reggie Ricardo Richard Rick Ricky "
    "Rob Robert Roberto Rodney Roger Roland Ron Ronald Ronnie Ross Roy Russell Ryan Salvador Sam Samuel Scott "
    "Sean Sebastian Sergio Seth Shane Shawn Sidney Simon Spencer Stan Stanley Stephen Steve Steven Stuart Ted "
    "Terrence Terry Theodore Thomas Tim Timothy Toby Todd Tom Tommy Tony Travis Trevor Tristan Tyler Vernon "
    "Victor Vincent Wade Walter Warren Wayne Wesley Will William Xavier Zachary Zack".split()
)
EITHER = tuple(
    "Addison Ariel Avery Bailey Billie Casey Dakota Dana Devon Emery Finley Harper Hayden Jamie Jessie Jordan "
    "Kai Kendall Kris Lane Lee Logan Morgan Parker Pat Peyton Quinn Reese Remy Riley Robin Rory Rowan Sage "
    "Sidney Skyler Stacey Taylor Tatum Val".split()
)
"""For names that no list has: nothing else in the text then says that the name is wrong."""
NO_NAMES = frozenset(
    "January February March April May June July August September October November December Monday Tuesday "
    "Wednesday Thursday Friday Saturday Sunday Mondays Tuesdays Wednesdays Thursdays Fridays Saturdays Sundays "
    "Christmas Easter Halloween Thanksgiving Valentine Mr Mrs Ms Miss Dr Sir Grandma Grandpa Mom Dad Aunt "
    "Uncle Coach Captain Professor King Queen Prince Princess English Spanish French German Chinese Japanese "
    "Russian Italian American Indian Mexican Canadian African Asian European British Irish Scottish Greek "
    "Latin Roman Math Science History Geography Biology Chemistry Physics Art Music City Street Avenue Road "
    "School High Middle Elementary Center Park Lake River Mount North South East West New San Los Saint The "
    "This That These Those How What When Where Which Who Why If Then There They She Her His Its Each Every All "
    "Some Two Three Four Five Six Seven Eight Nine Ten Find Let Given Suppose Compute Determine Express "
    "Evaluate Simplify Solve Note Assume Point Points Line Lines Triangle Circle Square Team Group Class Grade "
    "Room Box Bag Company Store Facebook Google Amazon Netflix Disney Pokemon Lego Internet Earth Mars Moon "
    "Sun Celsius Fahrenheit Kelvin Euler Pascal Fibonacci Fermat Pythagorean Cartesian Venn Gaussian Heron "
    "Newton Vieta Alaska Texas California Florida Hawaii Ohio Boston Chicago Paris London Rome Tokyo Berlin "
    "America Canada Mexico Brazil China Japan India Australia Africa Europe Asia France Germany Italy Spain "
    "England Twitter Instagram Apple Microsoft Tesla Toyota Walmart Santa Labrador Chevy Ford Honda".split()
)
